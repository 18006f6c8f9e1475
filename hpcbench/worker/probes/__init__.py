"""What runs of a calibration measure."""
