"""`astraflow run --only`: collects batches without training, or trains from collected batches."""
