"""Fine-tune a frozen transformer by changing almost nothing of it."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Name -> module. Loaded on first use, because torch takes seconds and `bitfit --help` must not. No module may have
# a name of this list: importing it would put the module in the function's place.
_HOMES = {
    "load_base": "model.base",
    "Base": "model.base",
    "train": "training.run",
    "sweep": "training.run",
    "Run": "training.run",
    "Plan": "training.plan",
    "predict": "prediction.predictor",
    "Predictor": "prediction.predictor",
    "MixedPredictor": "prediction.predictor",
    "export": "prediction.export",
    "select": "model.audit",
    "count": "model.audit",
    "Selection": "model.selection",
    "Delta": "delta.delta",
    "Bank": "bank.bank",
    "Model": "model.task_model",
    "Task": "tasks",
    "Client": "serve.client",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name == "tasks":
        return import_module(".tasks", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'bitfit' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
