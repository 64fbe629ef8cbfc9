"""CogVideoX: 2b, 5b and 1.5-5b, text, image and video to video."""
