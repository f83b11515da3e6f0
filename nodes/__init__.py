"""ComfyUI nodes; see README.md in this folder. Importing this package imports nothing of ComfyUI's."""
