"""Judge kernels: the test inputs, the reference and its budgets, the suite and its process."""
