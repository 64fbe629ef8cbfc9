"""HunyuanVideo-1.5 and HunyuanVideo, the model of 13 billion weights before."""
