"""Plain NumPy (or CuPy) statements of what every op computes: float64 truth, error budgets, and the NumPy backend."""
