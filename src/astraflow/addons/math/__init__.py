"""The reward `math_verify`: compares answers as mathematics."""
