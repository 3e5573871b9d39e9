"""Names that training scripts written for HyperPod import; everything behind them lives in `elastipod`."""

__version__ = "0.1.0"
