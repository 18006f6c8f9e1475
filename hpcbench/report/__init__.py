"""Tables, findings, plots and HTML pages made from results and predictions."""
