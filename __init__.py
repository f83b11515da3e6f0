"""MixGRPO for ComfyUI: reinforcement learning of flow-matching image models, inside the tool they are drawn with."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """What ComfyUI calls when it loads the folder; the nodes are imported here, so that importing the package costs nothing."""
    from .nodes.extension import MixGRPOExtension
    from .nodes.routes import register_routes

    register_routes()
    return MixGRPOExtension()
