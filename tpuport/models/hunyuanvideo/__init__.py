"""HunyuanVideo and HunyuanVideo-1.5."""
