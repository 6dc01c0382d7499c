"""Results turned into tables, figures and one page; nothing here imports torch."""
