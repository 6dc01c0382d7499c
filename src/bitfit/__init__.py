"""Fine-tune a frozen transformer by changing almost nothing of it."""

__version__ = "0.1.0"
