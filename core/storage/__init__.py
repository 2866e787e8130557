"""Read and write files: written whole or not at all, and libraries kept between runs."""
