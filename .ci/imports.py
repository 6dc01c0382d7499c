"""Import every module of the installed package; only a package that is not installed may prevent it."""

import importlib
import pkgutil
import sys

import bitfit

HEAVY = {"torch", "transformers", "tokenizers"}
EXTRAS = {"sklearn", "ray", "starlette", "pydantic", "uvicorn", "prometheus_client"}

imported = 0
for module in pkgutil.walk_packages(bitfit.__path__, "bitfit.", onerror=lambda name: None):
    if module.name == "bitfit.__main__":  # which runs the command line
        continue
    try:
        importlib.import_module(module.name)
        imported += 1
    except ImportError as error:
        if str(error.name).partition(".")[0] not in HEAVY | EXTRAS:
            raise
print(f"Python {sys.version.split()[0]}: {imported} modules import without torch")
