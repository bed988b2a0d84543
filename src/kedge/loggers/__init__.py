"""Write the metrics of runs to the trackers people use: CSV, TensorBoard, MLflow, W&B.

A logger is any object with the three methods of :class:`Logger`. Its name, class or instance is
given to ``kedge.run(..., log=[...])``, names to ``--log``.
"""

from kedge.loggers.host import observer as observer
from kedge.loggers.protocol import Logger as Logger
