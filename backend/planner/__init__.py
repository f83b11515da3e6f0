"""``mixgrpo plan``: what a job will cost, before anything is loaded; see README.md in this folder."""
