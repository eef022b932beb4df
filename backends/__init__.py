"""What is measured: attention backends, the tables they read, and the runners that replay them."""
