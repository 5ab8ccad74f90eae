// The functions of CANN that MindSpore needs more of than the value 0, as little as it needs. Built
// with the old std::string, as MindSpore is; `stubs.py` makes all others.
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>

extern "C" {
// What functions that create something return: not null, and nobody reads it.
char stub_object[4096];
}

namespace ge {

class AscendString {
 public:
  AscendString(const char *text);
  const char *GetString() const;
  bool operator<(const AscendString &other) const;

 private:
  std::shared_ptr<std::string> text_;
};
AscendString::AscendString(const char *text)
    : text_(text ? std::make_shared<std::string>(text) : nullptr) {}
const char *AscendString::GetString() const { return text_ ? text_->c_str() : ""; }
bool AscendString::operator<(const AscendString &other) const {
  return strcmp(GetString(), other.GetString()) < 0;
}

// A node of a graph: its name and type, and the numbers that MindSpore reads back.
class Operator {
 public:
  Operator() = default;
  Operator(const char *type);
  Operator(const char *name, const char *type);
  Operator(const AscendString &name, const AscendString &type);
  Operator(const std::string &type);
  Operator(const std::string &name, const std::string &type);
  virtual ~Operator() = default;
  std::string GetName() const;
  std::string GetOpType() const;
  unsigned int GetName(AscendString &name) const;
  unsigned int GetOpType(AscendString &type) const;
  int GetDynamicOutputNum(const std::string &name) const;
  void DynamicOutputRegister(const char *name, unsigned int count, const char *type, bool back);
  void DynamicOutputRegister(const char *name, unsigned int count, bool back);
  Operator &SetAttr(const char *name, long value);
  Operator &SetAttr(const char *name, int value);
  Operator &SetAttr(const char *name, unsigned int value);
  unsigned int GetAttr(const char *name, long &value) const;

 private:
  struct Node {
    std::string name, type;
    std::map<std::string, int> outputs;
    std::map<std::string, long> numbers;
  };
  std::shared_ptr<Node> node_;
};
Operator::Operator(const char *type) : Operator("", type) {}
Operator::Operator(const char *name, const char *type)
    : node_(std::make_shared<Node>(Node{name, type, {}, {}})) {}
Operator::Operator(const AscendString &name, const AscendString &type)
    : Operator(name.GetString(), type.GetString()) {}
Operator::Operator(const std::string &type) : Operator("", type.c_str()) {}
Operator::Operator(const std::string &name, const std::string &type)
    : Operator(name.c_str(), type.c_str()) {}
std::string Operator::GetName() const { return node_ ? node_->name : ""; }
std::string Operator::GetOpType() const { return node_ ? node_->type : ""; }
unsigned int Operator::GetName(AscendString &name) const {
  name = AscendString(GetName().c_str());
  return 0;
}
unsigned int Operator::GetOpType(AscendString &type) const {
  type = AscendString(GetOpType().c_str());
  return 0;
}
int Operator::GetDynamicOutputNum(const std::string &name) const {
  return node_ ? node_->outputs[name] : 0;
}
void Operator::DynamicOutputRegister(const char *name, unsigned int count, bool) {
  if (node_) node_->outputs[name] = count;
}
void Operator::DynamicOutputRegister(const char *name, unsigned int count, const char *, bool) {
  DynamicOutputRegister(name, count, false);
}
Operator &Operator::SetAttr(const char *name, long value) {
  if (node_) node_->numbers[name] = value;
  return *this;
}
Operator &Operator::SetAttr(const char *name, int value) {
  return SetAttr(name, static_cast<long>(value));
}
Operator &Operator::SetAttr(const char *name, unsigned int value) {
  return SetAttr(name, static_cast<long>(value));
}
unsigned int Operator::GetAttr(const char *name, long &value) const {
  if (!node_ || !node_->numbers.count(name)) return 1;
  value = node_->numbers[name];
  return 0;
}

using Creator = std::function<Operator(const AscendString &)>;
static std::map<std::string, Creator> &creators() {
  static auto *all = new std::map<std::string, Creator>;
  return *all;
}
class OperatorCreatorRegister {
 public:
  OperatorCreatorRegister(const char *type, const Creator &creator);
};
OperatorCreatorRegister::OperatorCreatorRegister(const char *type, const Creator &creator) {
  creators()[type] = creator;
}

class OperatorFactory {
 public:
  static Operator CreateOperator(const char *name, const char *type);
  static Operator CreateOperator(const std::string &name, const std::string &type);
  static bool IsExistOp(const char *type);
  static bool IsExistOp(const std::string &type);
};
Operator OperatorFactory::CreateOperator(const char *name, const char *type) {
  auto found = creators().find(type);
  return found == creators().end() ? Operator(name, type) : found->second(AscendString(name));
}
Operator OperatorFactory::CreateOperator(const std::string &name, const std::string &type) {
  return CreateOperator(name.c_str(), type.c_str());
}
// Only CANN knows which operators it has: that is not checked.
bool OperatorFactory::IsExistOp(const char *) { return true; }
bool OperatorFactory::IsExistOp(const std::string &) { return true; }

class Graph {
 public:
  Graph(const char *name);
  Graph(const std::string &name);
  std::string GetName() const;

 private:
  std::shared_ptr<std::string> name_;
};
Graph::Graph(const char *name) : name_(std::make_shared<std::string>(name)) {}
Graph::Graph(const std::string &name) : Graph(name.c_str()) {}
std::string Graph::GetName() const { return name_ ? *name_ : ""; }

}  // namespace ge

// Objects of one null pointer with its count, made or returned.
#define NULL_POINTER(symbol) \
  extern "C" void *symbol(void *object) { return memset(object, 0, 16); }
NULL_POINTER(_ZN2ge10TensorDescC1ENS_5ShapeENS_6FormatENS_8DataTypeE)
NULL_POINTER(_ZN2ge10TensorDescC1EOS0_)
NULL_POINTER(_ZN2ge10TensorDescC1ERKS0_)
NULL_POINTER(_ZN2ge10TensorDescC1Ev)
NULL_POINTER(_ZN2ge10TensorTypeC1ERKSt16initializer_listINS_8DataTypeEE)
NULL_POINTER(_ZN2ge5ShapeC1ERKSt6vectorIlSaIlEE)
NULL_POINTER(_ZN2ge5ShapeC1Ev)
NULL_POINTER(_ZN2ge6TensorC1ERKNS_10TensorDescE)
NULL_POINTER(_ZN2ge6TensorC1ERKNS_10TensorDescEPKhm)
NULL_POINTER(_ZN2ge6TensorC1Ev)
NULL_POINTER(_ZN2ge7PromoteC1ERKSt16initializer_listIPKcE)
NULL_POINTER(_ZN2ge7Session23GetCompiledGraphSummaryEj)
NULL_POINTER(_ZNK2ge10TensorDesc14GetOriginShapeEv)
NULL_POINTER(_ZNK2ge10TensorDesc8GetShapeEv)
NULL_POINTER(_ZNK2ge6Tensor13GetTensorDescEv)
NULL_POINTER(_ZNK2ge8Operator13GetOutputDescERKSs)
NULL_POINTER(_ZNK2ge8Operator13GetOutputDescEj)

// Empty vectors, returned.
#define EMPTY_VECTOR(symbol) \
  extern "C" void *symbol(void *object) { return memset(object, 0, 24); }
EMPTY_VECTOR(_ZNK2ge5GNode17GetInControlNodesEv)
EMPTY_VECTOR(_ZNK2ge5GNode18GetOutControlNodesEv)
EMPTY_VECTOR(_ZNK2ge5GNode26GetInDataNodesAndPortIndexsEi)
EMPTY_VECTOR(_ZNK2ge5GNode27GetOutDataNodesAndPortIndexsEi)
EMPTY_VECTOR(_ZNK2ge5Graph13GetDirectNodeEv)
EMPTY_VECTOR(_ZNK2ge5Shape7GetDimsEv)
