"""Problems, timing, records, tables and plots that the benchmarks share."""
