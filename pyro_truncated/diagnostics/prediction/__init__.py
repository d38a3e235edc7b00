"""Does the model predict? Cross-validation, calibration, restarts."""
