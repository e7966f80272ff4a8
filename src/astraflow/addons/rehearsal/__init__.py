"""`astraflow rehearse`: computes what a recipe needs and costs on GPUs, on a machine without any."""
