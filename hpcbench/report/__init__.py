"""Tables, findings, plots, HTML pages and terminal screens made from results and predictions."""
