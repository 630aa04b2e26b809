"""Commands that generate pages and plots of the documentation."""
