"""Names for numpy arrays in type hints."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
