"""Training EAGLE drafters: pictures a target draws, a layer that imitates it, a folder that `export` reads."""
