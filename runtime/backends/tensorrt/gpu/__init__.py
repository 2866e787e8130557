"""GPU memory, arrays in it that other libraries take and give, and CUDA graphs."""
