"""``mixgrpo doctor``: what a machine has, what is wrong with it, and what to do; see README.md in this folder."""
