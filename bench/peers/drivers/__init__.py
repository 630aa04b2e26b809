"""Driver programs, which run in the engines' environments and read jobs from stdin. Only that of Quintet imports it."""
