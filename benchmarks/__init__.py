"""The benchmark suite; ``python -m benchmarks`` runs all of it, see README.md."""
