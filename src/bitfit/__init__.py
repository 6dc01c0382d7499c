"""Fine-tune a frozen transformer by changing almost nothing of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not see what `__getattr__` loads
    from .bank.bank import Bank as Bank
    from .delta.delta import Delta as Delta
    from .model.audit import count as count
    from .model.audit import select as select
    from .model.base import Base as Base
    from .model.base import load_base as load_base
    from .model.selection import Selection as Selection
    from .model.task_model import Model as Model
    from .prediction.export import export as export
    from .prediction.peft_export import export_peft as export_peft
    from .prediction.peft_import import import_peft as import_peft
    from .prediction.predictor import MixedPredictor as MixedPredictor
    from .prediction.predictor import Predictor as Predictor
    from .prediction.predictor import evaluate as evaluate
    from .prediction.predictor import predict as predict
    from .prediction.push import push as push
    from .report.comparison import Comparison as Comparison
    from .report.comparison import compare as compare
    from .serve.client import Client as Client
    from .tasks import Task as Task
    from .training.plan import Plan as Plan
    from .training.run import Run as Run
    from .training.run import sweep as sweep
    from .training.run import train as train

__version__ = "0.2.0"

# Name -> module. Loaded on first use, because torch takes seconds and `bitfit --help` must not. No module may have
# a name of this list: importing the module would replace the function.
_MODULES = {
    "load_base": "model.base",
    "Base": "model.base",
    "train": "training.run",
    "sweep": "training.run",
    "Run": "training.run",
    "Plan": "training.plan",
    "predict": "prediction.predictor",
    "evaluate": "prediction.predictor",
    "Predictor": "prediction.predictor",
    "MixedPredictor": "prediction.predictor",
    "export": "prediction.export",
    "export_peft": "prediction.peft_export",
    "import_peft": "prediction.peft_import",
    "push": "prediction.push",
    "select": "model.audit",
    "count": "model.audit",
    "Selection": "model.selection",
    "Delta": "delta.delta",
    "Bank": "bank.bank",
    "Model": "model.task_model",
    "compare": "report.comparison",
    "Comparison": "report.comparison",
    "Task": "tasks",
    "Client": "serve.client",
}
_ROOMS = ("errors", "sklearn", "tasks")  # modules that are public as a whole
__all__ = ["__version__", *sorted(_MODULES)]


if not TYPE_CHECKING:  # a type checker would take any name for one that this function loads

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return import_module(f".{name}", __name__)
        if name not in _MODULES:
            raise AttributeError(f"module 'bitfit' has no attribute {name!r}")
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    hidden = {"Any", "TYPE_CHECKING", "import_module"}
    return sorted({*globals(), *__all__, *_ROOMS} - hidden)
