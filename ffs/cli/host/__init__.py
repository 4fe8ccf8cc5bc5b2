"""What a host offers and lacks: read by `facts`, `rdma` and `verbs`, judged by `findings` (pure)."""
