"""The dataflow service: admits work, values episodes, serves batches, and journals every decision."""
