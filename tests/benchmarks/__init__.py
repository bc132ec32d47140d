"""The programs in benchmarks/ that make claims without a machine to measure."""
