"""Scripts that trained what the package ships; never installed."""
