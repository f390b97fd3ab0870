"""Problems, timing, records, tables and plots that benchmarks share."""
