"""The parts behind `helper_functions`: one subject a file, nothing imported until it is needed."""

__version__ = "0.1.0"
