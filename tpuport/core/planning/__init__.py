"""What a model would take on a TPU that is not there: memory, time, traffic."""
