"""The torch backend: owns a model and its optimizer."""
