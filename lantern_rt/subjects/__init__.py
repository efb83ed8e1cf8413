"""Parts of a request: what an image is made from, and what takes part beside it. `table.py` lists all kinds."""
