"""Write the metrics of runs to the trackers people use: CSV, TensorBoard, MLflow, W&B."""
