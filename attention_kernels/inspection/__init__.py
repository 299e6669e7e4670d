"""What can be known of a kernel without a GPU: resources, memory accesses, faults."""
