"""Nodes of ComfyUI that let a server of `tpuport serve` make videos.

Copy this folder to ComfyUI's ``custom_nodes``; README.md beside this file says more.
"""

from .nodes import ImageToVideo, TextToVideo

NODE_CLASS_MAPPINGS = {
    "TpuportTextToVideo": TextToVideo,
    "TpuportImageToVideo": ImageToVideo,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "TpuportTextToVideo": "Text to video (tpuport)",
    "TpuportImageToVideo": "Image to video (tpuport)",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
