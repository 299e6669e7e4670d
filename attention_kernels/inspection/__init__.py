"""What can be learned about a kernel without a GPU: resources, memory accesses, faults."""
