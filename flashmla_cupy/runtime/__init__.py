"""Op-agnostic runtime: names a kernel (spec), assembles and compiles its source, caches, loads and launches it."""
