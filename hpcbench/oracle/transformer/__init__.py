"""Step time and memory of decoder transformers on published GPU machines, from shapes and layouts alone."""
