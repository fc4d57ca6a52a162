"""A person's documents: which files are meant, and the text that is in them, whatever their format."""

from edge_pc.documents.document_text import Document, document_of
from edge_pc.documents.reader import DocumentReader, Source, Sources

__all__ = ["Document", "DocumentReader", "Source", "Sources", "document_of"]
