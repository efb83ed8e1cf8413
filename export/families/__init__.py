"""Model families, one module each: checkpoint readers, prompts and defaults. They share the modules `common*`."""
