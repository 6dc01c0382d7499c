"""scikit-learn estimators: `BitFitClassifier`, `BitFitRegressor` and `BitFitTagger`. Needs the extra `sklearn`.

from bitfit.sklearn import BitFitClassifier

scores = cross_val_score(BitFitClassifier(), texts, labels)
"""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError('bitfit.sklearn needs scikit-learn: pip install "bitfit[sklearn]"', name="sklearn")

from .estimators import BitFitClassifier as BitFitClassifier
from .estimators import BitFitRegressor as BitFitRegressor
from .estimators import BitFitTagger as BitFitTagger

__all__ = ["BitFitClassifier", "BitFitRegressor", "BitFitTagger"]
