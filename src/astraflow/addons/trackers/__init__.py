"""Trackers: also show a run's metrics in TensorBoard, Weights & Biases, MLflow, or Trackio."""
