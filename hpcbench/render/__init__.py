"""Job scripts from Jinja2 templates."""
