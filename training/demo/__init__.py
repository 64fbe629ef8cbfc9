"""The text-to-video model of moving shapes: data, training and a judge."""
