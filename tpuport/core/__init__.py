"""The model-independent machinery. Nothing here names a model."""
