"""The options of the commands, each declared once. No torch is imported: `fastqt --help` answers at once."""
