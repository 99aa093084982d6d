// Shared by the files that make up pyfast._C.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "kernels.h"

extern const pyfast::Kernels* g_kernels;  // the table of the current instruction set (bindings.cpp); null until load()

inline const pyfast::Kernels& kernels() {
  if (!g_kernels)
    throw std::runtime_error("no CPU kernels are loaded: import pyfast.kernels.cpu before functions of pyfast._C");
  return *g_kernels;
}

void bind_attention(pybind11::module_& m);
void bind_moe(pybind11::module_& m);
void bind_row_map(pybind11::module_& m);
void bind_route(pybind11::module_& m);
void bind_symmetric(pybind11::module_& m);
